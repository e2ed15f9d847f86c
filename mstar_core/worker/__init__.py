"""One worker per rank: drains messages, schedules, launches steps, routes what comes out. Started by the supervisor."""
