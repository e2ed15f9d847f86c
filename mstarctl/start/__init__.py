"""Steps of `up`: options, devices, plan, checks of this host, launch and progress."""
