"""Objects that `mstarctl describe` shows: their data, and lines for people. One file per kind of object."""
