"""Gates: the user's optimizer, scaler and scheduler while a step is incomplete."""
