"""`spillway doctor`: what is wrong with this machine or cluster, and what to do."""
