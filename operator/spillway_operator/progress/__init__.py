"""The HTTPS endpoint to which trainers post their progress."""
