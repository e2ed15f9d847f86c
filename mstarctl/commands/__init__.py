"""One file per verb. Nothing is imported from here before the verb is called."""
