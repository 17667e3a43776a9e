"""What is known of nodes and pods: live memory, profiles, reservations."""
