package ops

import (
	"context"
	"net/http"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Overview is what a dashboard shows first.
type Overview struct {
	Seq       int64          `json:"seq" doc:"Grows with time. An overview with a lower one is older."`
	At        time.Time      `json:"at"`
	Sessions  []session.View `json:"sessions" nullable:"false"`
	Tasks     []task.View    `json:"tasks" nullable:"false" doc:"The latest 100, the newest first."`
	Questions []Question     `json:"questions" nullable:"false" doc:"Those that wait for an answer, the oldest first."`
	Cluster   string         `json:"cluster,omitempty" doc:"The cluster that the host belongs to."`
	Notes     []string       `json:"notes" nullable:"false" doc:"What the user of the host should know, such as a failed build of an image."`
}

const overviewTasks = 100

// GetOverview returns sessions, tasks and questions at once.
var GetOverview = Operation[struct{}, Overview]{Spec{
	ID: "getOverview", Method: http.MethodGet, Path: "/api/v1/overview", Tag: "dashboard", Need: Read,
	Summary: "Get or stream sessions, tasks and questions",
	About: "With `Accept: text/event-stream` a stream of server-sent events: `overview` at each change, but at most one a second. " +
		"A client that reads slowly misses some, but always receives the latest.",
}, func(ctx context.Context, e *Engine, _ *struct{}) (o Overview, err error) {
	o = Overview{At: time.Now().UTC().Truncate(time.Millisecond), Notes: []string{}}
	o.Seq = o.At.UnixMilli()
	if e.Cluster != nil {
		o.Cluster = e.Cluster.State.Cluster
	}
	for _, read := range []func() error{
		func() error {
			l, err := ListSessions.do(ctx, e, &struct{}{})
			o.Sessions = l.Sessions
			return err
		},
		func() error {
			l, err := listTasks(ctx, e, &TaskQuery{Limit: overviewTasks})
			o.Tasks = l.Tasks
			return err
		},
		func() error {
			l, err := ListQuestions.do(ctx, e, &QuestionQuery{})
			o.Questions = l.Questions
			return err
		},
	} {
		if err := read(); err != nil {
			return o, err
		}
	}
	if e.Images == nil {
		return o, nil
	}
	failures, err := e.Images.Failures()
	for _, f := range failures {
		o.Notes = append(o.Notes, "build of an image failed: "+termtext.Line(f.Error))
	}
	return o, err
}}
