"""The gateway: one address in front of many deployments, whose models share GPUs by bytes. No torch, no plugin code."""
