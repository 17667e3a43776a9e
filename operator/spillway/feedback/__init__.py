"""What was measured -> corrected predictions, and the plan of the next attempt."""
