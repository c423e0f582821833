package guestclient

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// stepLines converts the output of provision/run.sh into lines that say which of how
// many steps runs, and what it does.
type stepLines struct {
	names []string          // in order
	about map[string]string // a step's description: the first sentence of its script
	now   string            // the running step
}

func newStepLines(scripts fs.FS) (*stepLines, error) {
	files, err := fs.Glob(scripts, "[0-9][0-9]-*.sh")
	if err != nil {
		return nil, err
	}
	s := &stepLines{about: map[string]string{}}
	for _, file := range files {
		text, err := fs.ReadFile(scripts, file)
		if err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(path.Base(file), ".sh")
		s.names = append(s.names, name)
		_, comment, _ := strings.Cut(string(text), "\n# ")
		comment, _, _ = strings.Cut(comment, "\n")
		comment, _, _ = strings.Cut(comment, ". ")
		s.about[name] = strings.TrimSuffix(comment, ".")
	}
	return s, nil
}

// line converts one line of run.sh for people.
func (s *stepLines) line(text string) string {
	words := strings.Fields(text)
	if len(words) != 4 || words[0] != "step" || !slices.Contains(s.names, words[1]) {
		return s.at(text)
	}
	s.now = words[1]
	switch words[2] {
	case "start":
		return s.at(s.about[s.now])
	case "skip":
		return s.at("nothing to do")
	case "failed":
		return s.at("failed after " + words[3] + "s")
	default:
		return s.at(words[2] + " in " + words[3] + "s")
	}
}

func (s *stepLines) at(text string) string {
	if s.now == "" {
		return text
	}
	return fmt.Sprintf("step %d of %d, %s: %s", slices.Index(s.names, s.now)+1, len(s.names), s.now, text)
}
