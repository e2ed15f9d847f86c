"""Speech model: the talker, its projections and its residual code predictor."""
