"""Makes the report of check_data: statistics, anchors, pictures and the HTML page."""
