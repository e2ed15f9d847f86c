"""Parts that trainings of miniatures share. In no wheel: a checkout installed by `make install` finds them."""
