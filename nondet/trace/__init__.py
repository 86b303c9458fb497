"""From a token to the guilty operator: two arms of one request, and the first call that gave them other bits."""
