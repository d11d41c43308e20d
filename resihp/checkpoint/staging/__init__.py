"""From a state to an image of a rank's file in host memory, while training goes on."""
