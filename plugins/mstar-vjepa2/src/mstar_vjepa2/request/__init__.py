"""Request inputs: media, tensors, trajectories and planner inputs. Used by the processors; no torch."""
