"""Makes the report of check_data: statistics, anchors, tables, figures, sample images and the HTML page."""
