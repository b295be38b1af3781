"""What config.json says: one checked record, and the rotary embedding that it asks for."""
