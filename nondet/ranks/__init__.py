"""Several processes that compute together: started, asked, watched and ended by one that stays outside of them."""
