package screen

import (
	"context"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

// work is what the model does with a review: a review.Work, or a review without a repository in
// tests. Its methods may be called at the same time.
type work interface {
	Attempts() []attempt
	Branch() (name, tip string)
	DefaultMessage() string
	Refresh(ctx context.Context) error
	Land(ctx context.Context, r review.LandRequest) (review.Landed, error)
	MergeTool(ctx context.Context, c review.Conflict, t review.Terminal) (review.Resolution, error)
}

// attempt is one of the review's attempts: a review.Attempt, or that of a test. It is comparable,
// and Refresh and Land replace it.
type attempt interface {
	Source() review.Source
	Head() string
	Files() []review.File
	Landed() []string
	Patch(ctx context.Context, file int) (*review.Patch, error)
	Mark(file int) review.Mark
	Chosen(file int, k review.Key) bool
	Choose(ctx context.Context, file int, on bool, keys ...review.Key) error
	ChooseFile(file int, on bool) error
	ChooseAll(on bool) error
	Notes() []review.Note
	AddNote(t review.Target, text string) (review.Note, error)
	RemoveNote(id string) error
	Prompt() (prompt string, notes []review.Note)
	MarkSent(notes []review.Note) error
}

// reviewWork is a review.Work as the model uses it.
type reviewWork struct{ *review.Work }

func (w reviewWork) Attempts() []attempt {
	var all []attempt
	for _, a := range w.Work.Attempts() {
		all = append(all, a)
	}
	return all
}
