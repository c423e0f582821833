package repo

import (
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
)

// foldName returns the same string for names that a file system such as macOS's
// treats as equal: names that differ in case, or in the encoding of an accent.
func foldName(name string) string {
	return norm.NFC.String(cases.Fold().String(norm.NFD.String(name)))
}

// foldsNames reports whether the file system of dir treats such names as equal.
func (m *Mirrors) foldsNames(dir string) bool {
	if m.folds != nil {
		return m.folds(dir)
	}
	probe := filepath.Join(dir, "tmp_case_"+ids.New())
	if err := os.WriteFile(probe, nil, 0o600); err != nil {
		return true // unknown; assume that it does, which is the safe answer
	}
	defer os.Remove(probe)
	_, err := os.Stat(filepath.Join(dir, strings.ToUpper(filepath.Base(probe))))
	return err == nil
}

// fitsDisk reports whether a reference of that name can be stored as a file beside
// its lock file, and can be written as one line of git's input.
func fitsDisk(name string, folds bool) bool {
	if len(name) > 1000 || strings.ContainsAny(name, " ~^:?*[\\\x7f") || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' }) ||
		strings.Contains(name, "..") || strings.Contains(name, "@{") || strings.HasSuffix(name, ".") {
		return false
	}
	for part := range strings.SplitSeq(name, "/") {
		lock := part
		if folds {
			lock = foldName(part)
		}
		if part == "" || len(part) > 250 || strings.HasPrefix(part, ".") || strings.HasSuffix(lock, ".lock") {
			return false
		}
	}
	return true
}
