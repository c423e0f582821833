package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

const tasksPath = "/api/v1/tasks"

// TaskAnswer is the response to the submission or destruction of a task.
type TaskAnswer struct {
	task.View
	TaskID   string   `json:"task_id" doc:"Same as id."`
	Accepted bool     `json:"accepted" doc:"Always true; a request that is not accepted returns a Problem."`
	Notices  []string `json:"notices,omitempty" doc:"Where the task differs from the request."`
}

// CancelAnswer is the response to the cancellation of a task.
type CancelAnswer struct {
	task.View
	Success bool `json:"success" doc:"Always true; a refused request returns a Problem."`
}

// TaskPage is a page of the list of tasks.
type TaskPage struct {
	Tasks []task.View `json:"tasks" nullable:"false"`
	Next  string      `json:"next,omitempty" doc:"The after parameter for the next page; absent on the last page."`
}

// TaskPath is the part of a path that identifies the task. It is exported, like
// similar types, because huma ignores embedded types that are not exported.
type TaskPath struct {
	ID string `path:"id" doc:"Full id of the task." example:"4f2a81c0d9e3"`
}

type (
	// OnceInput identifies a request that the client may repeat.
	OnceInput struct {
		Key string `header:"Idempotency-Key" minLength:"1" maxLength:"255" pattern:"^[!-~]+$" doc:"The client's name for this request. A repetition with the same key and body within a day has no effect and receives the first response. The same key with another body is refused with 422."`
	}
	submitInput struct {
		OnceInput
		RawBody []byte
	}
	retryInput struct {
		TaskPath
		OnceInput
	}
	listInput struct {
		State string `query:"state" doc:"Only tasks in these states, separated by commas." example:"RUNNING,PENDING"`
		Label string `query:"label" doc:"Only tasks with this KEY=VALUE." example:"team=platform"`
		Limit int    `query:"limit" default:"50" minimum:"1" maximum:"500"`
		After string `query:"after" doc:"Only tasks older than the task with this id: next of the previous page."`
	}
	listOutput    struct{ Body TaskPage }
	taskOutput    struct{ Body task.View }
	cancelOutput  struct{ Body CancelAnswer }
	destroyOutput struct{ Body TaskAnswer }
	createdOutput struct {
		Location string `header:"Location"`
		Body     TaskAnswer
	}
)

func (s *Server) taskRoutes(api huma.API) {
	submit := route{
		id: "submitTask", method: http.MethodPost, path: tasksPath, tag: "tasks", need: Submit, ok: http.StatusAccepted, more: []int{409},
		summary: "Submit a task",
		about: "The body is a manifest: YAML, JSON, or JSON with the YAML in `manifest_yaml`. 202 means that it was accepted and will not be lost; " +
			"it waits in the queue. Below the scope `admin`, the token limits which repositories and profiles a manifest may name; " +
			"secrets, sessions, and repositories on the host's disk need `admin`.",
		accepts: []string{"application/yaml", "application/x-yaml", "text/yaml", "application/json"},
	}
	register(s, api, submit, s.submit)
	register(s, api, route{
		id: "listTasks", method: http.MethodGet, path: tasksPath, tag: "tasks", need: Read, more: []int{404},
		summary: "List tasks, newest first",
	}, s.list)
	register(s, api, route{
		id: "getTask", method: http.MethodGet, path: tasksPath + "/{id}", tag: "tasks", need: Read, more: []int{404},
		summary: "Get a task",
	}, func(ctx context.Context, in *TaskPath) (*taskOutput, error) {
		t, err := s.task(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		return &taskOutput{t.View()}, nil
	})
	register(s, api, route{
		id: "cancelTask", method: http.MethodDelete, path: tasksPath + "/{id}", tag: "tasks", need: Submit, ok: http.StatusAccepted, more: []int{404, 409},
		summary: "Cancel a task",
		about:   "Asks the agent to end, then forces it to, collects its results so far and removes the VM. Repeating it, or cancelling a task that has ended, changes nothing.",
	}, func(ctx context.Context, in *TaskPath) (*cancelOutput, error) {
		t, err := s.setDesired(ctx, in.ID, task.Cancel)
		if err != nil {
			return nil, err
		}
		return &cancelOutput{CancelAnswer{t.View(), true}}, nil
	})
	register(s, api, route{
		id: "destroyTask", method: http.MethodPost, path: tasksPath + "/{id}/destroy", tag: "tasks", need: Submit, ok: http.StatusAccepted, more: []int{404, 409},
		summary: "Cancel a task and remove its preserved VM",
	}, func(ctx context.Context, in *TaskPath) (*destroyOutput, error) {
		t, err := s.setDesired(ctx, in.ID, task.Destroyed)
		if err != nil {
			return nil, err
		}
		return &destroyOutput{TaskAnswer{t.View(), t.ID, true, nil}}, nil
	})
	register(s, api, route{
		id: "retryTask", method: http.MethodPost, path: tasksPath + "/{id}/retry", tag: "tasks", need: Submit, ok: http.StatusAccepted, more: []int{404, 409},
		summary: "Submit the manifest of an ended task again",
	}, s.retry)

	// Document all forms of submitTask's request body; huma knows only the raw one.
	op := api.OpenAPI().Paths[tasksPath].Post
	text := &huma.MediaType{Schema: &huma.Schema{Type: huma.TypeString, Description: "A manifest; GET /api/v1/manifest/schema describes it."}}
	op.RequestBody.Content = map[string]*huma.MediaType{
		"application/yaml": text, "application/x-yaml": text, "text/yaml": text,
		"application/json": {Schema: &huma.Schema{OneOf: []*huma.Schema{
			{Type: huma.TypeObject, Description: "A manifest; GET /api/v1/manifest/schema describes it.", Required: []string{"version", "kind"}},
			{
				Type: huma.TypeObject, Description: "A manifest's YAML.", Required: []string{"manifest_yaml"}, AdditionalProperties: false,
				Properties: map[string]*huma.Schema{"manifest_yaml": {Type: huma.TypeString}},
			},
		}}},
	}
}

// task returns the task with that full id. Programs know the full id, and a prefix
// that is unique today may be ambiguous tomorrow.
func (s *Server) task(ctx context.Context, id string) (task.Task, error) {
	if !isID(id) {
		return task.Task{}, noSuch("task", id)
	}
	return s.tasks.Get(ctx, id)
}

func (s *Server) submit(ctx context.Context, in *submitInput) (*createdOutput, error) {
	req := requestOf(ctx)
	text := bytes.Clone(in.RawBody) // huma reuses its buffer
	kind, _, err := mime.ParseMediaType(req.r.Header.Get("Content-Type"))
	if err == nil && kind == "application/json" {
		text, err = unwrap(text)
	}
	if err != nil {
		return nil, err
	}
	asked, notices, err := manifest.Parse("manifest", text, "")
	if err != nil {
		return nil, err
	}
	t, more, err := s.tasks.Submit(ctx, asked, task.Submission{Text: text, Actor: req.who.Name, TraceID: req.trace, Permission: req.who.may, Once: req.once(in.OnceInput, in.RawBody)})
	return s.created(t, slices.Concat(notices, more), err)
}

func (s *Server) created(t task.Task, notices []string, err error) (*createdOutput, error) {
	if fail.CodeOf(err) == fail.NotFound { // a name in the manifest was not found; the requested path exists
		p := *problemOf(err)
		p.Status, p.Title = http.StatusUnprocessableEntity, http.StatusText(http.StatusUnprocessableEntity)
		return nil, &p
	}
	if err != nil {
		return nil, err
	}
	s.submitted()
	return &createdOutput{tasksPath + "/" + t.ID, TaskAnswer{t.View(), t.ID, true, notices}}, nil
}

// unwrap returns the YAML of {"manifest_yaml": "…"}, and any other JSON unchanged,
// because the manifest parser reports errors with their positions.
func unwrap(text []byte) ([]byte, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	token := func() any {
		t, err := d.Token()
		if err != nil {
			return err // an error never equals an expected token
		}
		return t
	}
	if token() != json.Delim('{') || token() != "manifest_yaml" {
		return text, nil
	}
	yaml, ok := token().(string)
	if !ok || token() != json.Delim('}') || token() != io.EOF { //nolint:errorlint // the decoder's own value
		return nil, fail.New(fail.Usage, `manifest_yaml must be the only field, and a string: {"manifest_yaml": "version: ..."}`).WithHint(seeDocs)
	}
	return []byte(yaml), nil
}

func (s *Server) list(ctx context.Context, in *listInput) (*listOutput, error) {
	f := store.TaskFilter{Limit: in.Limit + 1}
	if in.State != "" {
		for name := range strings.SplitSeq(in.State, ",") {
			p := task.Phase(strings.ToUpper(name))
			if !slices.Contains(task.Phases(), p) {
				return nil, fail.New(fail.Usage, "unknown state %q: must be one of %v", short(name), task.Phases()).WithHint(seeDocs)
			}
			f.Phases = append(f.Phases, string(p))
		}
	}
	if in.Label != "" {
		key, value, ok := strings.Cut(in.Label, "=")
		if !ok || key == "" {
			return nil, fail.New(fail.Usage, "label must be KEY=VALUE, got %q", short(in.Label)).WithHint("label=team=platform, with the second = escaped or not")
		}
		f.Label = store.Label{Key: key, Value: value}
	}
	if in.After != "" {
		if !isID(in.After) {
			return nil, fail.New(fail.Usage, "after must be a task id").WithHint("use next of the previous page, or leave it out")
		}
		f.After = in.After
	}
	all, err := s.tasks.List(ctx, f)
	if err != nil {
		return nil, err
	}
	page := TaskPage{Tasks: []task.View{}}
	if len(all) > in.Limit {
		all = all[:in.Limit]
		page.Next = all[in.Limit-1].ID
	}
	for _, t := range all {
		page.Tasks = append(page.Tasks, t.View())
	}
	return &listOutput{page}, nil
}

func (s *Server) setDesired(ctx context.Context, id string, desired task.DesiredPhase) (task.Task, error) {
	t, err := s.task(ctx, id)
	if err != nil {
		return task.Task{}, err
	}
	req := requestOf(ctx)
	if t, err = s.tasks.SetDesired(ctx, t, desired, task.Client{Actor: req.who.Name, Permission: req.who.may}); err != nil {
		return task.Task{}, err
	}
	s.submitted() // a slot may be free
	return t, nil
}

func (s *Server) retry(ctx context.Context, in *retryInput) (*createdOutput, error) {
	t, err := s.task(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	req := requestOf(ctx)
	again, notices, err := s.tasks.Retry(ctx, t, task.Submission{Actor: req.who.Name, TraceID: req.trace, Permission: req.who.may, Once: req.once(in.OnceInput, nil)})
	return s.created(again, notices, err)
}

// once returns the submission's idempotency key, or nil if the client sent none.
// The digest covers the method, the path and the body.
func (req *request) once(in OnceInput, body []byte) *task.Once {
	if in.Key == "" {
		return nil
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s\n%s", req.r.Method, req.r.URL.Path, body))
	return &task.Once{Key: in.Key, Digest: hex.EncodeToString(sum[:])}
}
