"""Programs that no one here wrote, run against miniatures: `make outside`."""
