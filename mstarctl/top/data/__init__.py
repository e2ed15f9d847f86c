"""What the screens show: frames of the watch, recordings, history, requests to the deployment. No textual."""
