"""Models that the trainer can build. A model knows no technique: it is a chain of named segments, nothing more."""
