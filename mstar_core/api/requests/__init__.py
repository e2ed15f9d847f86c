"""Live requests: their registry, the record of their attempts, its limits, and the manager that sends them again."""
