"""The plain optimizer, and what every optimizer shares: schedule, loss scale, trainable parameters."""
