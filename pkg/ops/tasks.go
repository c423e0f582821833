package ops

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// TaskAnswer is the response to the submission or destruction of a task.
type TaskAnswer struct {
	task.View
	TaskID   string   `json:"task_id" doc:"Same as id."`
	Accepted bool     `json:"accepted" doc:"Always true; a request that is not accepted returns a Problem."`
	Notices  []string `json:"notices,omitempty" doc:"Where the task differs from the request."`
}

// Location returns the path of the task.
func (a TaskAnswer) Location() string { return TasksPath + "/" + a.ID }

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

// TaskPath is the part of a path that identifies the task. It is exported, like similar
// types, because huma ignores embedded types that are not exported.
type TaskPath struct {
	ID string `path:"id" doc:"Full id of the task." example:"4f2a81c0d9e3"`
}

// Once identifies a request that the client may repeat.
type Once struct {
	Key string `header:"Idempotency-Key" minLength:"1" maxLength:"255" pattern:"^[!-~]+$" doc:"The client's name for this request. A repetition with the same key and body within a day has no effect and receives the first response. The same key with another body is refused with 422."`
}

// task returns the idempotency key for package task, or nil if the client sent none. The
// digest covers the path and the body.
func (o Once) task(path string, body []byte) *task.Once {
	if o.Key == "" {
		return nil
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "POST %s\n%s", path, body))
	return &task.Once{Key: o.Key, Digest: hex.EncodeToString(sum[:])}
}

// session returns the key of a request for a session, as task does.
func (o Once) session(n NewSession) *task.Once {
	body, err := json.Marshal(n)
	if err != nil {
		panic(err) // it came as JSON
	}
	return o.task(SessionsPath, body)
}

// Requests for operations on tasks.
type (
	SubmitRequest struct {
		Once
		Session     string `query:"session" maxLength:"12" doc:"Id of an existing session to run in, instead of the manifest's. Needs the scope admin."`
		Name        string `query:"name" maxLength:"4096" doc:"Name of the manifest in errors."`
		Dir         string // directory of this host to which the manifest's paths are relative; not part of the API
		ContentType string `header:"Content-Type" hidden:"true"`
		RawBody     []byte
	}
	FindTaskRequest struct {
		Name string `query:"name" required:"true" maxLength:"255" doc:"A task's id, the start of it, or a name that only one task has."`
	}
	RetryRequest struct {
		TaskPath
		Once
	}
	TaskQuery struct {
		State string `query:"state" doc:"Only tasks in these states, separated by commas." example:"RUNNING,PENDING"`
		Label string `query:"label" doc:"Only tasks with this KEY=VALUE." example:"team=platform"`
		Limit int    `query:"limit" default:"50" minimum:"1" maximum:"500"`
		After string `query:"after" doc:"Only tasks older than the task with this id: next of the previous page."`
	}
)

// Operations on tasks.
var (
	SubmitTask = Operation[SubmitRequest, TaskAnswer]{Spec{
		ID: "submitTask", Method: http.MethodPost, Guest: true, Path: TasksPath, Tag: "tasks", Need: Submit, Status: http.StatusAccepted, Errors: []int{409},
		Summary: "Submit a task",
		About: "The body is a manifest: YAML, JSON, or JSON with the YAML in `manifest_yaml`. 202 means that it was accepted and will not be lost; " +
			"it waits in the queue. Below the scope `admin`, the token limits which repositories and profiles a manifest may name; " +
			"secrets, sessions, and repositories on the host's disk need `admin`.",
		Accepts: []string{"application/yaml", "application/x-yaml", "text/yaml", "application/json"},
	}, submitTask}

	ListTasks = Operation[TaskQuery, TaskPage]{Spec{
		ID: "listTasks", Method: http.MethodGet, Guest: true, Path: TasksPath, Tag: "tasks", Need: Read, Errors: []int{404},
		Summary: "List tasks, newest first",
	}, listTasks}

	CheckTask = Operation[SubmitRequest, CheckedTask]{Spec{
		ID: "checkTask", Method: http.MethodPost, Path: TasksPath + "/check", Tag: "tasks", Need: Submit, Errors: []int{409},
		Summary: "Check a manifest without submitting it",
		About:   "The answer is the manifest with all defaults.",
		Accepts: SubmitTask.Accepts,
	}, func(ctx context.Context, e *Engine, r *SubmitRequest) (CheckedTask, error) {
		asked, _, notices, err := r.parse(false)
		if err != nil {
			return CheckedTask{}, err
		}
		more, err := e.Tasks.Check(ctx, asked)
		if err != nil {
			return CheckedTask{}, contentError(err)
		}
		text, err := json.Marshal(asked)
		return CheckedTask{text, asked.Repository.URL, asked.VM.Session, slices.Concat(notices, more)}, err
	}}

	FindTask = Operation[FindTaskRequest, task.View]{Spec{
		ID: "findTask", Method: http.MethodGet, Path: TasksPath + "/find", Tag: "tasks", Need: Read, Errors: []int{404},
		Summary: "Find the task that a person means",
	}, func(ctx context.Context, e *Engine, r *FindTaskRequest) (task.View, error) {
		t, err := e.Tasks.Find(ctx, r.Name)
		if err != nil {
			return task.View{}, err
		}
		return t.View(), nil
	}}

	ListArtifacts = Operation[TaskPath, ArtifactList]{Spec{
		ID: "listArtifacts", Method: http.MethodGet, Guest: true, Path: TasksPath + "/{id}/artifacts", Tag: "tasks", Need: Read, Errors: []int{404, 410},
		Summary: "List the collected artifacts of a task",
	}, func(ctx context.Context, e *Engine, r *TaskPath) (ArtifactList, error) {
		t, err := e.Task(ctx, r.ID)
		if err == nil && !t.IsElsewhere() {
			err = e.Tasks.CheckFiles(t)
		}
		return ArtifactList{append([]task.Artifact{}, t.Status.Artifacts...), append([]task.Skipped{}, t.Status.Skipped...)}, err
	}}

	GetTask = Operation[TaskPath, task.View]{Spec{
		ID: "getTask", Method: http.MethodGet, Guest: true, Path: TasksPath + "/{id}", Tag: "tasks", Need: Read, Errors: []int{404},
		Summary: "Get a task",
	}, func(ctx context.Context, e *Engine, r *TaskPath) (task.View, error) {
		t, err := e.Task(ctx, r.ID)
		if err != nil {
			return task.View{}, err
		}
		v := e.view(t)
		if v.Usage, err = e.Tasks.Usage(ctx, t.ID); err != nil {
			return v, err
		}
		kin, err := e.Tasks.Below(ctx, t.ID)
		for _, k := range kin {
			if k.Parent == t.ID {
				v.Subtasks = append(v.Subtasks, k.ID)
			}
		}
		return v, err
	}}

	CancelTask = Operation[TaskPath, CancelAnswer]{Spec{
		ID: "cancelTask", Method: http.MethodDelete, Guest: true, Path: TasksPath + "/{id}", Tag: "tasks", Need: Submit, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Cancel a task",
		About:   "Asks the agent to end, then forces it to, collects its results so far and removes the VM. Repeating it, or cancelling a task that has ended, changes nothing.",
	}, func(ctx context.Context, e *Engine, r *TaskPath) (CancelAnswer, error) {
		t, err := e.setDesired(ctx, r.ID, task.Cancel)
		if err != nil {
			return CancelAnswer{}, err
		}
		return CancelAnswer{e.view(t), true}, nil
	}}

	DestroyTask = Operation[TaskPath, TaskAnswer]{Spec{
		ID: "destroyTask", Method: http.MethodPost, Path: TasksPath + "/{id}/destroy", Tag: "tasks", Need: Submit, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Cancel a task and remove its preserved VM",
	}, func(ctx context.Context, e *Engine, r *TaskPath) (TaskAnswer, error) {
		t, err := e.setDesired(ctx, r.ID, task.Destroyed)
		if err != nil {
			return TaskAnswer{}, err
		}
		return TaskAnswer{t.View(), t.ID, true, nil}, nil
	}}

	RetryTask = Operation[RetryRequest, TaskAnswer]{Spec{
		ID: "retryTask", Method: http.MethodPost, Path: TasksPath + "/{id}/retry", Tag: "tasks", Need: Submit, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Submit the manifest of an ended task again",
	}, func(ctx context.Context, e *Engine, r *RetryRequest) (TaskAnswer, error) {
		t, err := e.Task(ctx, r.ID)
		if err != nil {
			return TaskAnswer{}, err
		}
		once := r.Once.task(TasksPath+"/"+r.ID+"/retry", nil)
		again, notices, err := e.Tasks.Retry(ctx, t, task.Submission{Actor: e.Caller.Name, Permission: e.Caller.submitPermission(), Once: once})
		return e.submitted(ctx, again, notices, err)
	}}
)

// NoSuch returns the error for an id that nothing has.
func NoSuch(what, id string) error {
	hint := "agent-sessionizer list"
	if what == "task" {
		hint = "agent-sessionizer task list --all"
	}
	return fail.New(fail.NotFound, "no %s %q", what, short(id)).WithHint("%s", hint)
}

func short(s string) string { return s[:min(len(s), 20)] }

// Task returns the task with that full id. Programs know the full id, and a prefix that is
// unique today may be ambiguous tomorrow.
func (e *Engine) Task(ctx context.Context, id string) (task.Task, error) {
	if !ids.Valid(id) {
		return task.Task{}, NoSuch("task", id)
	}
	t, err := e.Tasks.Get(ctx, id)
	if fail.CodeOf(err) == fail.NotFound {
		err = NoSuch("task", id)
	}
	if err == nil && e.Caller.Session != "" {
		kin, err := e.below(ctx)
		if err != nil {
			return task.Task{}, err
		}
		if !slices.ContainsFunc(kin, func(k store.Kin) bool { return k.ID == id }) {
			return task.Task{}, NoSuch("task", id)
		}
	}
	return t, err
}

// below returns the subtasks that the caller, a session's guest, can see.
func (e *Engine) below(ctx context.Context) ([]store.Kin, error) {
	s, err := e.Tasks.Sessions.Get(ctx, e.Caller.Session)
	if err != nil {
		return nil, err
	}
	return e.Tasks.Below(ctx, s.Subject())
}

// listBelow returns the latest subtasks of the caller, a session's guest.
func listBelow(ctx context.Context, e *Engine, most int) (TaskPage, error) {
	page := TaskPage{Tasks: []task.View{}}
	kin, err := e.below(ctx)
	if err != nil {
		return page, err
	}
	for _, k := range slices.Backward(kin) {
		if len(page.Tasks) == most {
			break
		}
		t, err := e.Tasks.Get(ctx, k.ID)
		if err != nil {
			return page, err
		}
		page.Tasks = append(page.Tasks, e.view(t))
	}
	return page, nil
}

// view returns a task as the caller may see it.
func (e *Engine) view(t task.Task) task.View {
	if e.Caller.Session != "" {
		return t.GuestView()
	}
	return t.View()
}

func (e *Engine) setDesired(ctx context.Context, id string, desired task.DesiredPhase) (task.Task, error) {
	t, err := e.Task(ctx, id)
	if err != nil {
		return t, err
	}
	if t, err = e.Tasks.SetDesired(ctx, t, desired, task.Client{Actor: e.Caller.Name, Permission: e.Caller.Permission}); err != nil {
		return t, err
	}
	if err := e.schedule(ctx); err != nil { // a slot may be free
		e.Log.WarnContext(ctx, "failed to start waiting tasks", "error", err)
	}
	return t, nil
}

// CheckedTask is a manifest with all defaults.
type CheckedTask struct {
	Manifest   json.RawMessage `json:"manifest" doc:"As GET /api/v1/manifest/schema describes it."`
	Repository string          `json:"repository,omitempty"`
	Session    string          `json:"session,omitempty" doc:"The existing session in which the task would run."`
	Notices    []string        `json:"notices,omitempty" doc:"Where the task would differ from the manifest."`
}

// ArtifactList lists the collected and the skipped artifacts of a task.
type ArtifactList struct {
	Artifacts []task.Artifact `json:"artifacts" nullable:"false"`
	Skipped   []task.Skipped  `json:"skipped" nullable:"false" doc:"Files that were left in the guest, and why."`
}

// parse returns the manifest, and its text as far as that describes the task.
func (r *SubmitRequest) parse(subtask bool) (asked *manifest.Task, text []byte, notices []string, err error) {
	text = bytes.Clone(r.RawBody) // huma reuses its buffer
	kind, _, err := mime.ParseMediaType(r.ContentType)
	if err == nil && kind == "application/json" {
		text, err = unwrap(text)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	if subtask {
		asked, notices, err = manifest.ParseSubtask(cmp.Or(r.Name, "manifest"), text)
		return asked, text, notices, err
	}
	asked, notices, err = manifest.ParseIn(r.Session, cmp.Or(r.Name, "manifest"), text, r.Dir)
	if r.Session != "" {
		text = nil // it lacks the session
	}
	return asked, text, notices, err
}

func submitTask(ctx context.Context, e *Engine, r *SubmitRequest) (TaskAnswer, error) {
	asked, text, notices, err := r.parse(e.Caller.Session != "")
	if err != nil {
		return TaskAnswer{}, err
	}
	path := TasksPath
	if r.Session != "" {
		path += "?session=" + r.Session
	}
	once := r.Once.task(path, r.RawBody)
	t, more, err := e.Tasks.Submit(ctx, asked, task.Submission{Text: text, Actor: e.Caller.Name, Permission: e.Caller.submitPermission(), Session: e.Caller.Session, Fetch: e.Fetch, Once: once})
	return e.submitted(ctx, t, slices.Concat(notices, more), err)
}

// contentError marks the error of something that a request names and that does not exist.
func contentError(err error) error {
	if fail.CodeOf(err) == fail.NotFound {
		return marked{err, ErrContent}
	}
	return err
}

func (e *Engine) submitted(ctx context.Context, t task.Task, notices []string, err error) (TaskAnswer, error) {
	if err != nil {
		return TaskAnswer{}, contentError(err)
	}
	if err := e.schedule(ctx); err != nil { // the task is queued, and every command tries again
		if e.Caller.Session != "" {
			e.Log.WarnContext(ctx, "failed to start waiting tasks", "error", err)
			err = errors.New("the host refuses it for now")
		}
		notices = append(notices, fmt.Sprintf("the task is queued but could not be started: %v", err))
	}
	if e.Caller.Session != "" {
		for i, n := range notices {
			notices[i] = task.HidePaths(n)
		}
	}
	return TaskAnswer{e.view(t), t.ID, true, notices}, nil
}

// TaskWithFiles returns a task whose logs and artifacts still exist.
func (e *Engine) TaskWithFiles(ctx context.Context, id string) (task.Task, error) {
	t, err := e.Task(ctx, id)
	if err != nil {
		return t, err
	}
	return t, e.Tasks.CheckFiles(t)
}

// unwrap returns the YAML of {"manifest_yaml": "…"}, and any other JSON unchanged, because
// the manifest parser reports errors with their positions.
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
		return nil, fail.New(fail.Usage, `manifest_yaml must be the only field, and a string: {"manifest_yaml": "version: ..."}`).WithHint(SeeDocs)
	}
	return []byte(yaml), nil
}

func listTasks(ctx context.Context, e *Engine, r *TaskQuery) (TaskPage, error) {
	if e.Caller.Session != "" {
		return listBelow(ctx, e, r.Limit)
	}
	f := store.TaskFilter{Limit: r.Limit + 1}
	if r.State != "" {
		for name := range strings.SplitSeq(r.State, ",") {
			p := task.Phase(strings.ToUpper(name))
			if !slices.Contains(task.Phases(), p) {
				return TaskPage{}, fail.New(fail.Usage, "unknown state %q: must be one of %v", short(name), task.Phases()).WithHint("agent-sessionizer task list --help")
			}
			f.Phases = append(f.Phases, string(p))
		}
	}
	if r.Label != "" {
		key, value, ok := strings.Cut(r.Label, "=")
		if !ok || key == "" {
			return TaskPage{}, fail.New(fail.Usage, "label must be KEY=VALUE, got %q", short(r.Label)).WithHint("label=team=platform, with the second = escaped or not")
		}
		f.Label = store.Label{Key: key, Value: value}
	}
	if r.After != "" {
		if !ids.Valid(r.After) {
			return TaskPage{}, fail.New(fail.Usage, "after must be a task id").WithHint("use next of the previous page, or leave it out")
		}
		f.After = r.After
	}
	all, err := e.Tasks.List(ctx, f)
	if err != nil {
		return TaskPage{}, err
	}
	page := TaskPage{Tasks: []task.View{}}
	if len(all) > r.Limit {
		all = all[:r.Limit]
		page.Next = all[r.Limit-1].ID
	}
	for _, t := range all {
		page.Tasks = append(page.Tasks, t.View())
	}
	return page, nil
}
