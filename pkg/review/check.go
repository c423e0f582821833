package review

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/zricethezav/gitleaks/v8/detect"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/leaks"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// largeFile is the size from which a file needs the user's consent, in bytes.
const largeFile = 10 << 20

// maxFindings limits the findings of one check.
const maxFindings = 200

// rules returns the detector of all reviews.
var rules = sync.OnceValues(leaks.NewDetector)

// scanning protects the detector.
var scanning sync.Mutex

// check looks for secrets and large files that are new in what was selected. What the file had before, and
// what the user has accepted, is not reported.
func (w *Work) check(ctx context.Context, selected []*selection, r LandRequest) ([]Finding, error) {
	var found []Finding
	add := func(more []Finding) (full bool) {
		for _, f := range more {
			if !slices.ContainsFunc(r.Accept, func(ok Finding) bool { return ok.ID == f.ID }) {
				found = append(found, f)
			}
		}
		return len(found) >= maxFindings
	}
	for _, s := range selected {
		for _, path := range slices.Sorted(maps.Keys(s.edits)) {
			e := s.edits[path]
			if !e.Regular() || e.ID == s.before[path].ID {
				continue
			}
			more, err := w.checkFile(ctx, s, path, e)
			if err != nil {
				return nil, fmt.Errorf("check %s: %w", printable(path), err)
			}
			if add(more) {
				return found[:maxFindings], nil
			}
		}
	}
	more, err := scan("", "commit message", r.Message, "")
	add(more)
	return found, err
}

func (w *Work) checkFile(ctx context.Context, s *selection, path string, e repo.Entry) ([]Finding, error) {
	session := s.attempt.source.Name
	text, size, err := w.trees.Blob(ctx, e.ID, largeFile)
	if err != nil {
		return nil, err
	}
	if size > largeFile {
		what := fmt.Sprintf("the file has %d MiB, and is not searched for secrets", size>>20)
		return []Finding{{ID: string(makeKey("large", session, path, e.ID)), Session: session, Path: path, Rule: "large-file", What: what}}, nil
	}
	old := ""
	if was := s.before[path]; was.Regular() {
		if old, _, err = w.trees.Blob(ctx, was.ID, largeFile); err != nil {
			return nil, err
		}
	}
	return scan(session, path, text, old)
}

// scan looks for secrets in a text that the old text did not have.
func scan(session, path, text, old string) ([]Finding, error) {
	d, err := rules()
	if err != nil {
		return nil, err
	}
	scanning.Lock()
	defer scanning.Unlock()
	var found []Finding
	for _, f := range d.Detect(detect.Fragment{Raw: text, FilePath: path}) {
		if f.Secret == "" || old != "" && strings.Contains(old, f.Secret) {
			continue
		}
		found = append(found, Finding{
			ID:      string(makeKey("secret", session, path, f.RuleID, f.Secret)),
			Session: session, Path: path, Line: f.StartLine + 1, Rule: f.RuleID, What: termtext.Brief(termtext.Line(f.Description), 200),
		})
	}
	slices.SortFunc(found, func(a, b Finding) int { return a.Line - b.Line })
	return found, nil
}
