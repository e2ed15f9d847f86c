"""What a process tells of itself: its life towards the supervisor, logs, events, counters. No torch, no sockets."""
