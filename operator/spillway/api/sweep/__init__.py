"""What makes several models of one job: members, the search that makes them, and successive halving."""
