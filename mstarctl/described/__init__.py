"""Objects as `mstarctl describe` shows them: data, and lines for people. One file a sort of object."""
