package console

import (
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Tint colours the cells of a column by their content.
type Tint struct {
	Column string // header of the column
	Of     func(cell string) Tone
}

// Table writes rows in columns as the result. Cells are cleaned. An empty cell becomes a
// dash, so that scripts find the same number of fields in every row.
func (c *Console) Table(header []string, rows [][]string, tints ...Tint) {
	widths := make([]int, len(header))
	all := append([][]string{header}, rows...)
	for i, row := range all {
		clean := make([]string, len(header))
		for j := range header {
			if j < len(row) {
				clean[j] = termtext.Line(row[j])
			}
			if clean[j] == "" {
				clean[j] = "-"
			}
			widths[j] = max(widths[j], cells(clean[j]))
		}
		all[i] = clean
	}
	for i, row := range all {
		var b strings.Builder
		for j, cell := range row {
			painted := cell
			for _, t := range tints {
				if i > 0 && t.Column == header[j] {
					painted = c.Paint(t.Of(cell), cell)
				}
			}
			b.WriteString(painted)
			if j < len(row)-1 {
				b.WriteString(strings.Repeat(" ", widths[j]-cells(cell)+2))
			}
		}
		line := b.String()
		if i == 0 {
			line = c.Paint(Faint, line)
		}
		c.line(c.Out, line)
	}
}
