"""From a problem and a target to a plan. Pure: nothing here asks a device, compiles or launches."""
