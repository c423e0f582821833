package ops

import (
	"context"
	"io"
	"net/http"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/recording"
)

// RecordingsPath is the path below which the API has its recordings.
const RecordingsPath = "/api/v1/recordings"

// The forms of a recording.
const (
	Asciicast = "asciicast"
	PlainText = "text"
)

// Recording is a recorded terminal, with the name of what it belongs to.
type Recording struct {
	recording.Recording
	Name string `json:"name" doc:"Name of the session or task."`
}

// RecordingList is a list of recordings.
type RecordingList struct {
	Recordings []Recording `json:"recordings" nullable:"false" doc:"The last changed first."`
}

// FoundLine is a line that a terminal has shown.
type FoundLine struct {
	recording.Match
	Name string `json:"name" doc:"Name of the session or task."`
}

// RecordingMatches is the result of a search.
type RecordingMatches struct {
	Matches []FoundLine `json:"matches" nullable:"false" doc:"The latest first."`
	More    bool        `json:"more" doc:"There may be more matches than the limit."`
}

// RemovedRecordings is what was removed.
type RemovedRecordings struct {
	Size int64 `json:"size" doc:"Bytes on the host's disk."`
}

// Requests for operations on recordings.
type (
	RecordingQuery struct {
		Subject string `query:"subject" maxLength:"12" doc:"Only of the session or task with this id."`
	}
	RecordingSearch struct {
		Text       string `query:"text" required:"true" minLength:"1" maxLength:"1000" doc:"What the line contains."`
		Subject    string `query:"subject" maxLength:"12" doc:"Only of the session or task with this id."`
		IgnoreCase bool   `query:"ignore_case" doc:"Whether upper and lower case of ASCII letters are equal."`
		Limit      int    `query:"limit" default:"100" minimum:"1" maximum:"1000"`
	}
	RecordingPath struct {
		ID string `path:"id" maxLength:"22" doc:"The id of a recording." example:"3f2a9c1b7d4e-2"`
	}
	RecordingsOf struct {
		ID string `path:"id" maxLength:"22" doc:"The id of a recording, or that of a session or task for all of its recordings." example:"3f2a9c1b7d4e-2"`
	}
)

// Operations on recordings.
var (
	ListRecordings = Operation[RecordingQuery, RecordingList]{Spec{
		ID: "listRecordings", Method: http.MethodGet, Path: RecordingsPath, Tag: "recordings", Need: Read,
		Summary: "List the recordings of terminals",
		About:   "They are those of this host's sessions and tasks, also of ended ones.",
	}, func(ctx context.Context, e *Engine, r *RecordingQuery) (RecordingList, error) {
		all, err := e.recordings().List(r.Subject)
		if err != nil {
			return RecordingList{}, err
		}
		list, names := RecordingList{[]Recording{}}, e.subjectNames(ctx)
		for _, rec := range all {
			list.Recordings = append(list.Recordings, Recording{rec, names(rec.Subject)})
		}
		return list, nil
	}}

	SearchRecordings = Operation[RecordingSearch, RecordingMatches]{Spec{
		ID: "searchRecordings", Method: http.MethodGet, Path: RecordingsPath + "/search", Tag: "recordings", Need: Read,
		Summary: "Find lines that terminals have shown",
		About:   "The lines come from guests: they are safe to print, but must not be trusted.",
	}, func(ctx context.Context, e *Engine, r *RecordingSearch) (RecordingMatches, error) {
		limit := r.Limit
		if limit < 1 || limit > recording.MaxMatches {
			limit = 100
		}
		found, more, err := e.recordings().Search(ctx, recording.Query{Text: r.Text, Subject: r.Subject, IgnoreCase: r.IgnoreCase, Limit: limit})
		if err != nil {
			return RecordingMatches{}, err
		}
		result, names := RecordingMatches{Matches: []FoundLine{}, More: more}, e.subjectNames(ctx)
		for _, m := range found {
			result.Matches = append(result.Matches, FoundLine{m, names(m.Subject)})
		}
		return result, nil
	}}

	RemoveRecordings = Operation[RecordingsOf, RemovedRecordings]{Spec{
		ID: "removeRecordings", Method: http.MethodDelete, Path: RecordingsPath + "/{id}", Tag: "recordings", Need: Admin, Errors: []int{404},
		Summary: "Remove a recording, or all recordings of a session or task",
		About:   "A terminal that is being recorded continues in a new recording.",
	}, func(_ context.Context, e *Engine, r *RecordingsOf) (RemovedRecordings, error) {
		size, err := e.recordings().Remove(r.ID)
		return RemovedRecordings{size}, err
	}}
)

func (e *Engine) recordings() recording.Store {
	return recording.Store{Dir: e.sessions().Config.Paths.Recordings()}
}

// subjectNames returns a function that returns the name of a session or task, or its id if it has none.
func (e *Engine) subjectNames(ctx context.Context) func(id string) string {
	known := map[string]string{}
	return func(id string) string {
		name, ok := known[id]
		if !ok {
			name = id
			if s, err := e.sessions().Get(ctx, id); err == nil {
				name = s.Name
			} else if t, err := e.Tasks.Get(ctx, id); err == nil && t.Name != "" {
				name = t.Name
			}
			known[id] = name
		}
		return name
	}
}

// readRecording opens a recording in one of its forms.
func (e *Engine) readRecording(ctx context.Context, id, format string) (io.ReadCloser, error) {
	r, err := e.recordings().Get(id)
	if err != nil {
		return nil, err
	}
	write := r.WriteCast
	switch format {
	case Asciicast, "":
	case PlainText:
		write = r.WriteText
	default:
		return nil, fail.New(fail.Usage, "format must be %s or %s, got %.20q", Asciicast, PlainText, format).WithHint("agent-sessionizer recordings export %s --format text", id)
	}
	from, to := io.Pipe()
	go func() { to.CloseWithError(write(ctx, to)) }() // it ends when the reader closes
	return from, nil
}
