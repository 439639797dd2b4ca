"""Process groups: start, watch and stop several processes as one."""
