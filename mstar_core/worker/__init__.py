"""Worker process, one per rank: schedules and launches steps and routes their results. Started by the supervisor."""
