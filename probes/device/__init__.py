"""What the devices hold: by torch's own counters, and by the driver's."""
