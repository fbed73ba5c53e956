"""What must survive: copies to go back to."""
