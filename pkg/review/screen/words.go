package screen

import "unicode"

// Limits of the comparison of words, whose time grows with the square of their number.
const (
	maxWords    = 200        // of a line
	maxCompared = 20_000_000 // pairs of words of a file
)

// words splits a line into words, runs of spaces, and single other characters.
func words(line string) []string {
	var all []string
	start, kind := 0, 0
	for i, r := range line {
		k := 0
		switch {
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '_':
			k = 1
		case unicode.IsSpace(r):
			k = 2
		case unicode.IsMark(r):
			k = kind // never apart from what it belongs to
			if i > start {
				continue
			}
		}
		if i > start && (k != kind || k == 0) {
			all = append(all, line[start:i])
			start = i
		}
		kind = k
	}
	if start < len(line) {
		all = append(all, line[start:])
	}
	return all
}

// piece is a part of a line, and whether the other version of the line lacks it.
type piece struct {
	text    string
	changed bool
}

// comparer compares the words of lines, and stops to do so for a file with too many.
type comparer struct{ compared int }

// compare returns the pieces of two versions of a line. Lines that have hardly anything in common
// have no changed words: one is not a version of the other.
func (c *comparer) compare(old, new string) (a, b []piece) {
	from, to := words(old), words(new)
	c.compared += len(from) * len(to)
	if len(from) > maxWords || len(to) > maxWords || c.compared > maxCompared {
		return []piece{{old, false}}, []piece{{new, false}}
	}
	common := commonWords(from, to)
	if int(common[0][0])*3 < max(len(from), len(to)) {
		return []piece{{old, false}}, []piece{{new, false}}
	}
	i, j := 0, 0
	for i < len(from) || j < len(to) {
		switch {
		case i < len(from) && j < len(to) && from[i] == to[j]:
			a, b = join(a, from[i], false), join(b, to[j], false)
			i, j = i+1, j+1
		case j == len(to) || i < len(from) && common[i+1][j] >= common[i][j+1]:
			a = join(a, from[i], true)
			i++
		default:
			b = join(b, to[j], true)
			j++
		}
	}
	return a, b
}

// commonWords returns the length of the longest common subsequence of from[i:] and to[j:], for each
// i and j.
func commonWords(from, to []string) [][]int16 {
	common := make([][]int16, len(from)+1)
	for i := range common {
		common[i] = make([]int16, len(to)+1)
	}
	for i := len(from) - 1; i >= 0; i-- {
		for j := len(to) - 1; j >= 0; j-- {
			if from[i] == to[j] {
				common[i][j] = common[i+1][j+1] + 1
			} else {
				common[i][j] = max(common[i+1][j], common[i][j+1])
			}
		}
	}
	return common
}

func join(all []piece, text string, changed bool) []piece {
	if n := len(all); n > 0 && all[n-1].changed == changed {
		all[n-1].text += text
		return all
	}
	return append(all, piece{text, changed})
}
