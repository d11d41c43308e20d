"""What is slow beside devices: links, groups' collectives, hosts."""
