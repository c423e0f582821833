package mcpserver

import (
	"context"
	"io"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Inputs of tools.
type (
	submitInput struct {
		Manifest string `json:"manifest" jsonschema:"YAML or JSON; see GET /api/v1/manifest/schema or docs/tasks.md"`
	}
	taskInput struct {
		Task string `json:"task" jsonschema:"a task's id, as submit_task returns it"`
	}
	waitInput struct {
		taskInput
		Seconds int `json:"seconds,omitempty" jsonschema:"how long to wait, at most 600, or 60 for subtasks; 60 if absent"`
	}
	artifactInput struct {
		taskInput
		Name string `json:"name,omitempty" jsonschema:"an artifact of the list; the list itself if absent"`
	}
)

// longest is how long watch_task waits at most.
const longest = 10 * time.Minute

// taskTools adds the tools for tasks, which perform operations on host and wait at most for that
// time. named finds the task that an input means.
func taskTools(s *mcp.Server, host func(context.Context) ops.Host, wait time.Duration, named func(context.Context, taskInput) (ops.TaskPath, error)) {
	addTool(s, adds, "submit_task", "Submit a task", "Submit a task: an unattended run of an agent in a VM of its own.", func(ctx context.Context, in submitInput) (any, error) {
		return ops.SubmitTask.On(ctx, host(ctx), ops.SubmitRequest{ContentType: "application/yaml", RawBody: []byte(in.Manifest)})
	})
	addTool(s, reads, "list_tasks", "List tasks", "List the latest tasks with their states.", func(ctx context.Context, _ noInput) (any, error) {
		return ops.ListTasks.On(ctx, host(ctx), ops.TaskQuery{Limit: 50})
	})
	addTool(s, reads, "watch_task", "Watch a task", "Wait until a task has ended, or the time is up, and return its state.", func(ctx context.Context, in waitInput) (any, error) {
		at, err := named(ctx, in.taskInput)
		if err != nil {
			return nil, err
		}
		limit := time.Minute
		if in.Seconds > 0 {
			limit = time.Duration(min(in.Seconds, int(longest.Seconds()))) * time.Second
		}
		return AwaitTask(ctx, host(ctx), at, min(limit, wait))
	})
	addTool(s, destroys, "cancel_task", "Cancel a task", "Cancel a task and collect its results so far. Its VM is removed.", func(ctx context.Context, in taskInput) (any, error) {
		at, err := named(ctx, in)
		if err != nil {
			return nil, err
		}
		return ops.CancelTask.On(ctx, host(ctx), at)
	})
	addTool(s, reads, "task_artifacts", "Get a task's artifacts", "List the artifacts of a task, or read one of them, such as its patch.", func(ctx context.Context, in artifactInput) (any, error) {
		at, err := named(ctx, in.taskInput)
		if err != nil {
			return nil, err
		}
		if in.Name == "" {
			return ops.ListArtifacts.On(ctx, host(ctx), at)
		}
		f, err := host(ctx).Read(ctx, ops.File{Task: at.ID, Artifact: in.Name})
		if err != nil {
			return nil, err
		}
		defer f.Close()
		text, err := io.ReadAll(io.LimitReader(f, maxResult+1))
		return string(text), err
	})
}

// AwaitTask waits until a task has ended, for some time.
func AwaitTask(ctx context.Context, h ops.Host, at ops.TaskPath, limit time.Duration) (task.View, error) {
	for end := time.Now().Add(limit); ; {
		v, err := ops.GetTask.On(ctx, h, at)
		if err != nil || v.State.Over() || !time.Now().Before(end) {
			return v, err
		}
		select {
		case <-ctx.Done():
			return v, ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
}
