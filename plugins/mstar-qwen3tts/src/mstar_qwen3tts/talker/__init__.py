"""Node `Talker`: the speech model with its code predictor."""
