"""The service's side: objects, quotas and handlers of each connection."""
