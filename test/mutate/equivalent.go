package main

import (
	"bufio"
	"fmt"
	"io"
	"strings"
)

// readEquivalent reads the list of mutants that no test can detect, by package and key.
// Indented lines below each entry state the reason:
//
//	pkg/store (*feed).leave | never | t == nil
//		The caller has just checked.
func readEquivalent(r io.Reader) (map[string]map[string]bool, error) {
	list := map[string]map[string]bool{}
	in := bufio.NewScanner(r)
	last, reasons := "", 0
	missing := func() error { return fmt.Errorf("%q has no reason; add an indented line below it", last) }
	for in.Scan() {
		line := in.Text()
		switch {
		case strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#"):
		case line[0] == ' ' || line[0] == '\t':
			reasons++
		default:
			if last != "" && reasons == 0 {
				return nil, missing()
			}
			pkg, key, ok := strings.Cut(line, " ")
			if !ok {
				return nil, fmt.Errorf("%q is not a package and a key", line)
			}
			if list[pkg] == nil {
				list[pkg] = map[string]bool{}
			}
			list[pkg][key] = true
			last, reasons = line, 0
		}
	}
	if last != "" && reasons == 0 {
		return nil, missing()
	}
	return list, in.Err()
}
