"""Load of a run: requests and the times at which they are due."""
