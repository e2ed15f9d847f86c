"""Devices of this host and what they carry: choice, GPUs, capacity, admission. Used by the planner and `doctor`."""
