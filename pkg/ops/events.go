package ops

import "github.com/agent-sessionizer/agent-sessionizer/pkg/store"

// Event is a store's event with an anchor after which reading can continue.
type Event struct {
	ID string `json:"id" doc:"SUBJECT/SEQ: the after, or Last-Event-ID, to read on from here."`
	store.Event
}

// EventPage is a page of the events of a task or a session, in order.
type EventPage struct {
	Events []Event `json:"events" nullable:"false"`
	Next   string  `json:"next" doc:"The after parameter for the next page, even if that page is empty now."`
	Oldest int64   `json:"oldest" doc:"Sequence of the oldest event in the store."`
	Newest int64   `json:"newest"`
}

// EventQuery selects a page or a stream of events.
type EventQuery struct {
	ID     string `path:"id" doc:"Full id of the task or session." example:"4f2a81c0d9e3"`
	After  string `query:"after" doc:"Position after which to read: a sequence, an event's id, oldest or newest. Default: the beginning."`
	Last   string `header:"Last-Event-ID" doc:"Like after, which takes precedence. An EventSource sends it when it reconnects."`
	Limit  int    `query:"limit" default:"100" minimum:"1" maximum:"1000" doc:"Number of events of a page. A stream has no limit."`
	Accept string `header:"Accept" doc:"text/event-stream requests a stream."`
}
