package session

import (
	"context"
	"slices"
)

// Interactive returns the sessions that people work in: those of List that do not
// belong to a task.
func (m *Manager) Interactive(ctx context.Context) ([]Session, error) {
	all, err := m.List(ctx)
	return slices.DeleteFunc(all, func(s Session) bool { return s.Task != "" }), err
}
