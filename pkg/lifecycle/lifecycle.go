// Package lifecycle is what the lives of sessions and tasks have in common: a table of
// transitions between phases, the events that report a keeper's work, and how rows are
// read and found. It never knows what a phase means.
package lifecycle

import (
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// Transitions maps each phase to the phases that may follow it.
type Transitions[P ~string] map[P][]P

// Allow reports whether to may follow from.
func (t Transitions[P]) Allow(from, to P) bool { return slices.Contains(t[from], to) }

// ViewError is the last failure.
type ViewError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// LastError returns the failure in a row, or nil if the row has none.
func LastError(code, message, hint string) *ViewError {
	if code == "" {
		return nil
	}
	return &ViewError{Code: code, Message: message, Hint: hint}
}

// ReadAll returns the values of rows.
func ReadAll[R, T any](rows []R, read func(R, error) (T, error)) ([]T, error) {
	all := make([]T, 0, len(rows))
	for _, row := range rows {
		v, err := read(row, nil)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

// Only returns the one element of found, the matches of what a user typed. It refuses
// several, which name tells apart. Without any, ok is false.
func Only[T any](found []T, what, hint string, name func(T) string) (one T, ok bool, err error) {
	if len(found) == 1 {
		return found[0], true, nil
	}
	var names []string
	for _, f := range found {
		names = append(names, name(f))
	}
	if len(names) > 0 {
		err = fail.New(fail.Usage, "%q could be any of %s", what, strings.Join(names, ", ")).WithHint("%s", hint)
	}
	return one, false, err
}

// Tend calls wake if no keeper holds lock. died says that the last keeper was killed; each
// death is reported once. err says why that is unknown.
func Tend(lock string, wake func(died bool, err error) error) error {
	if lockfile.Held(lock) {
		return nil
	}
	return wake(lockfile.Died(lock))
}
