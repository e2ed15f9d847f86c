"""What `up` does, step by step: devices, plan, checks of this version, launch, progress, cause of a failure."""
