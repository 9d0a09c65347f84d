"""A connection between client and service, with calls in both directions."""
