"""Why devices are idle: causes by rule, intervals of idle time, and their shares of steps."""
