"""Operations on a running deployment: cordons, rolling restarts, changes of scale and of settings."""
