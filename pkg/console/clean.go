package console

import (
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/plain"
)

// cleanLines is plain.Line for text of several lines; it keeps them and their
// indentation.
func cleanLines(s string) []string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		indent := len(l) - len(strings.TrimLeft(l, " "))
		lines[i] = l[:indent] + plain.Line(l)
	}
	return lines
}

// fit cuts s to a width in terminal cells.
func fit(s string, width int) string { return ansi.Truncate(s, max(width, 0), "…") }

// cells is the width of s on a terminal.
func cells(s string) int { return ansi.StringWidth(s) }
